"""`python -m atoll`: the same as `atoll`, where the script is not on the path."""

from atoll.entry import main

if __name__ == "__main__":
    main()
