"""`softfocus bench`: attention backends timed beside torch's own, interleaved, and only while they
compute the right thing.
"""
