"""The paper's tables and figures, one file an item."""
