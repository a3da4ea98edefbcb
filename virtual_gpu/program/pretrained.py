def install(patches, watch): pass
