"""Claims of the papers: what each says, the runs that test it, and what they show. The shipped ones
lie here, too.
"""
