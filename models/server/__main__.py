"""Run the server: `python -m models.server`."""

from models.server.command import run

if __name__ == "__main__":
    run()
