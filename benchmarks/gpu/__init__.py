"""What a GPU does, against what it could. Without one they are skipped; `--dry` runs them tiny."""
