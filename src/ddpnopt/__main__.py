"""The `ddpnopt` program: says what to install when the command line's dependencies are missing."""

import sys


def main() -> None:
    try:
        from ddpnopt.lab.cli import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("ddpnopt"):
            raise
        sys.exit(f"ddpnopt: the command line needs {missing.name}: pip install 'ddpnopt[cli]' (in a clone: '.[cli]')")
    app()


if __name__ == "__main__":
    main()
