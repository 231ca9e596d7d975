"""`python patches`: works with any Python that has `packaging`, from any folder."""

from series.commands import main

if __name__ == "__main__":
    main()
