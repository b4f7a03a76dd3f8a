"""What-if calculators: goodput under failures, bandwidth between data centers, the cost of upsizing.

profile.py says what a cluster is and what happens to it, chips.py plays one learner through it, cluster_world.py lets
the shipped protocol run the rounds between such learners, goodput.py counts and makes tables, calibration.py fits a
profile. bandwidth.py and upsizing.py are formulas.
"""
