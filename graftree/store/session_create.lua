-- Creates a session record. A repeat of the same call (same nonce) is answered as the first was.
-- KEYS: record, tokens, log probabilities.  ARGV: nonce, lease ms, ttl ms, output so far, its log probabilities, then
-- field, value, ...
if redis.call('EXISTS', KEYS[1]) == 1 then
  if redis.call('HGET', KEYS[1], 'nonce') == ARGV[1] then
    return { 'OK' }
  end
  return { 'EXISTS' }
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'nonce', ARGV[1], 'lease', string.format('%.0f', now + ARGV[2]), unpack(ARGV, 6))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
for index = 2, 3 do
  local output = ARGV[index + 2]
  if #output > 0 then
    redis.call('SET', KEYS[index], output, 'PX', ARGV[3])
  else
    redis.call('DEL', KEYS[index])
  end
end
return { 'OK' }
