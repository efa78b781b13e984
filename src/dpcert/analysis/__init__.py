"""Per-sample metrics at each test image (gradient, curvature, Lipschitz constant) and their relation to the radius."""
