"""What was measured, as JSON, and the program that makes tables, charts and docs of it."""
