"""What rank 0 alone does: connections, records, evaluation, totals and cost; and what other ranks do instead."""
