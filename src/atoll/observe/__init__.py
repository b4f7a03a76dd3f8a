"""What people look at: the summary, the screen, the words at the end. All folds over events and status; reads only."""
