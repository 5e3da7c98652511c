"""The curvatures M of Table 2: identity, adaptive diagonal, Kronecker-factored."""
