-- release: (group_id, fence). The missing members go back at once, and nobody has failed.
if holds(ARGV[1], ARGV[2]) then
  leave(ARGV[1], 'leased')
  enter(ARGV[1], 'queued', ARGV[1])
end
