"""`python -m openk3` is `openk3`."""

from openk3.cli.main import main

if __name__ == "__main__":
    main()
