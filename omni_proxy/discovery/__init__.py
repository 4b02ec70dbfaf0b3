"""What sources of `[[discover]]` say, turned into workers: pods, DNS answers. PURE."""
