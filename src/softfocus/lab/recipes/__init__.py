"""Recipes: what a model is, what it is trained on, and how. The shipped ones lie here, too."""
