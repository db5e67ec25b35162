-- drop: (epoch, reason, group ids ...), in whatever state they are. A lease on one of them is lost.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
for i = 3, #ARGV do
  for _, state in ipairs({ 'queued', 'leased', 'ready', 'claimed' }) do
    if redis.call('ZSCORE', base .. ':' .. state, ARGV[i]) then drop(ARGV[i], state, ARGV[2]) end
  end
end
