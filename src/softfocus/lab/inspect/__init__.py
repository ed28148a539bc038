"""`softfocus inspect`: what a run's attention looks at."""
