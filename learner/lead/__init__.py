"""What rank 0 alone does: connections, records, evaluation, totals and cost."""
