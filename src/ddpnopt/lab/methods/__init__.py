"""Every training method by a short name: `method.py` says what one is, `registry.py` lists them all."""
