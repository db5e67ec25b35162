-- release: (group_id, fence). The missing members go back at once, and nobody has failed.
if holds(ARGV[1], ARGV[2]) then end_lease(ARGV[1], 'queued', ARGV[1]) end
