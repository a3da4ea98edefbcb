"""What was run where the figures of benchmarks/measured were read, one module a source: see `recipe.Recipe`."""
