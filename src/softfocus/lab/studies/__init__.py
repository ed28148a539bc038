"""Several models trained and measured side by side. The shipped studies lie here, too."""
