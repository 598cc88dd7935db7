import io.nats.client.Connection;
import io.nats.client.ConsumeOptions;
import io.nats.client.IterableConsumer;
import io.nats.client.JetStream;
import io.nats.client.Message;
import io.nats.client.Nats;
import io.nats.client.Options;
import io.nats.client.OrderedConsumerContext;
import io.nats.client.api.DeliverPolicy;
import io.nats.client.api.OrderedConsumerConfiguration;
import io.nats.client.api.RetentionPolicy;
import io.nats.client.api.StorageType;
import io.nats.client.api.StreamConfiguration;
import java.io.IOException;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.function.Consumer;

/**
 * Drives NATS JetStream: {@code servers} is a list of URLs. One file stream with three replicas and a subject for
 * each "ledger". Whether a server syncs before it answers is its own setting.
 */
public final class NatsDrive implements Drive.Target {
  private static final Duration WAIT = Duration.ofSeconds(30);
  private static final int BATCH = 5000;

  private final String servers;
  private final Connection connection;
  private final JetStream stream;

  private NatsDrive(String servers) throws Exception {
    this.servers = servers;
    connection = connect();
    StreamConfiguration configuration =
        StreamConfiguration.builder()
            .name("bench")
            .subjects("bench.*")
            .replicas(3)
            .storageType(StorageType.File)
            .retentionPolicy(RetentionPolicy.Limits)
            .build();
    long giveUpAt = System.nanoTime() + 60_000_000_000L;
    while (true) {
      try {
        connection.jetStreamManagement().addStream(configuration);
        break;
      } catch (IOException error) { // the servers have yet to elect a leader
        if (System.nanoTime() > giveUpAt) {
          throw error;
        }
        Thread.sleep(200);
      }
    }
    stream = connection.jetStream();
  }

  @Override
  public CompletableFuture<?> add(int ledger, byte[] payload) {
    return stream.publishAsync("bench." + ledger, payload);
  }

  private Connection connect() throws Exception {
    return Nats.connect(
        new Options.Builder().servers(servers.split(",")).maxMessagesInOutgoingQueue(0).build());
  }

  private static OrderedConsumerContext consumer(Connection by, DeliverPolicy from) throws Exception {
    return by.getStreamContext("bench")
        .createOrderedConsumer(
            new OrderedConsumerConfiguration().filterSubject("bench.0").deliverPolicy(from));
  }

  @Override
  public void beginReading() {}

  @Override
  public long readAll(long entries) throws Exception {
    long bytes = 0;
    ConsumeOptions options = ConsumeOptions.builder().batchSize(BATCH).build();
    try (IterableConsumer found = consumer(connection, DeliverPolicy.All).iterate(options)) {
      for (long count = 0; count < entries; count++) {
        Message message = found.nextMessage(WAIT);
        if (message == null) {
          throw new IllegalStateException("no message " + count + " within " + WAIT);
        }
        bytes += message.getData().length;
      }
    }
    return bytes;
  }

  @Override
  public void follow(Consumer<byte[]> seen) throws Exception {
    consumer(connect(), DeliverPolicy.New).consume(message -> seen.accept(message.getData()));
  }

  @Override
  public int leader() throws Exception {
    String name =
        connection.jetStreamManagement().getStreamInfo("bench").getClusterInfo().getLeader();
    return Integer.parseInt(name.substring(1));
  }

  @Override
  public void close() throws Exception {
    connection.close();
  }

  public static void main(String[] arguments) throws Exception {
    Drive.run(arguments, (servers, ledgers, inFlight) -> new NatsDrive(servers));
  }
}
