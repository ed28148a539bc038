"""What measurements look like: tables, figures, pages, and comparisons of runs."""
