"""Files that a new loss brings by CONTRIBUTING's recipe; ``test_recipes.py`` copies them into a copy of the package."""
