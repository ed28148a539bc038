"""What a finished run is measured by."""
