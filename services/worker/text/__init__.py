"""From token ids to text: detokenizing, stop strings, and what a full context drops. Pure."""
