"""`foveal plan`: budgets and objects without or against a cluster."""
