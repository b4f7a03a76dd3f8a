"""Inside the user's training process: the public face, and what it does between two steps."""
