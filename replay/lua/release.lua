-- release: (group_id, fence). Queues a leased group again at once; no attempt is counted.
if holds(ARGV[1], ARGV[2]) then
  leave(ARGV[1], 'leased')
  enter(ARGV[1], 'queued', ARGV[1])
end
