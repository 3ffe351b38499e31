"""Who of the operator's replicas acts: one at a time, by a Lease, so that a lost one is replaced in
seconds.
"""
