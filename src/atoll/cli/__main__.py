"""`python -m atoll.cli`."""

from atoll.cli import main

if __name__ == "__main__":
    main()
