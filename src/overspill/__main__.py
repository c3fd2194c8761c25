"""`python -m overspill`: the command line, also where its script is not on the path."""

from overspill.cli.main import main

if __name__ == "__main__":
    main()
