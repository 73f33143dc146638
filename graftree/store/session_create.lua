-- Creates a session record. A repeat of the same call (same nonce) is answered as the first was.
-- KEYS: record, tokens.  ARGV: nonce, lease ms, ttl ms, output so far, then field, value, ...
if redis.call('EXISTS', KEYS[1]) == 1 then
  if redis.call('HGET', KEYS[1], 'nonce') == ARGV[1] then
    return { 'OK' }
  end
  return { 'EXISTS' }
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'nonce', ARGV[1], 'lease', string.format('%.0f', now + ARGV[2]), unpack(ARGV, 5))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
if #ARGV[4] > 0 then
  redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[3])
else
  redis.call('DEL', KEYS[2])
end
return { 'OK' }
