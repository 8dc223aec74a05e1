"""Run the serving bench: `python -m bench.serving`."""

from bench.serving.cli import main

if __name__ == "__main__":
    main()
