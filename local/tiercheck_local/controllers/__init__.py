"""What a control plane without controller manager lacks and a job needs: scheduling, node
life-cycle, disruption budgets, garbage collection."""
