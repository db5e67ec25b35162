-- drop: (epoch, reason, group ids ...), in whatever state they are. A lease on one of them is lost.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
for i = 3, #ARGV do
  local state = state_of(ARGV[i])
  if state then drop(ARGV[i], state, ARGV[2]) end
end
