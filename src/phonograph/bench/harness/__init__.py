"""lm-evaluation-harness on the offline API as `phonograph eval` runs it (extra `eval`)."""
