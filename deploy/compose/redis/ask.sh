if [ -f /etc/tandem/secrets/redis-password ]; then
  REDISCLI_AUTH=$(cat /etc/tandem/secrets/redis-password)
  export REDISCLI_AUTH
fi
[ "$(redis-cli -p 6379 ping)" = PONG ]
