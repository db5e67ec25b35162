-- release: (group_id, fence). The missing members go back at once, and nobody has failed.
if holds(ARGV[1], ARGV[2]) then requeue(ARGV[1]) end
