"""JSON schemas as llguidance takes them: keywords that it lacks, rewritten into those that it has."""
