"""How each test image sits in the model's landscape: slope, curvature, Lipschitz constant, and what they tell of the radius."""
