"""The lab: recipes, corpora, training, evaluation and reports. Imports all of softfocus, is
imported by none of it.
"""
