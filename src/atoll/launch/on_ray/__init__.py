"""A run on a Ray cluster: an actor controls it, and keepers, one actor for each process, start plain commands.

| module | what it is |
| --- | --- |
| `keeper` | one process on one node, started and watched; knows no Ray |
| `actors` | a keeper as the controller sees it: a child like those of this machine |
| `groups` | a learner over several nodes: several keepers, one child |
| `syncers` | the two syncers of a run, of which one serves and one stands by |
| `cluster` | which nodes there are, what they have, and what a run needs of them |
| `controller` | the run: what `atoll train` does on one machine, with keepers for children |

Nothing here but `actors`, `groups`, `syncers`, `cluster` and `controller` imports Ray (docs/adr/0034).
"""
