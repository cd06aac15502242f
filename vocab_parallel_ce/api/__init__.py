"""What users call: signatures and their documentation."""
