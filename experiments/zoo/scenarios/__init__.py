"""Training code in the style of those who outgrow a GPU, and its steps."""
