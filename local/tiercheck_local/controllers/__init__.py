"""Controllers do what a job needs of a control plane: scheduling, nodes, budgets, garbage."""
