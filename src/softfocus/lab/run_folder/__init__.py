"""A run folder: what it holds, who writes it, and what wrote it."""
