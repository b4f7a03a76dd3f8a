"""What a cluster gives: goodput, uptime, participation and tokens, under failures, by each way of training.

profile.py says what the cluster is and what happens to it, chips.py lives one learner's life through it, played.py lets
the shipped protocol run the rounds between such learners, tally.py counts, cell.py puts one experiment together and
table.py many of them.
"""
