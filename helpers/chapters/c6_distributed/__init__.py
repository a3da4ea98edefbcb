"""Chapter 6: training on several ranks, really run, and the ledger of what each rank holds."""
