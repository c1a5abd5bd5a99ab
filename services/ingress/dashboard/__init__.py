"""The page at `/`: the files that a browser loads, as they are."""
