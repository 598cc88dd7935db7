import io.nats.client.Connection;
import io.nats.client.JetStream;
import io.nats.client.Nats;
import io.nats.client.Options;
import io.nats.client.api.RetentionPolicy;
import io.nats.client.api.StorageType;
import io.nats.client.api.StreamConfiguration;
import java.io.IOException;
import java.util.concurrent.CompletableFuture;

/**
 * Drives NATS JetStream: {@code servers} is a list of URLs. One file stream with three replicas and a subject for
 * each "ledger". Whether a server syncs before it answers is its own setting.
 */
public final class NatsDrive implements Drive.Target {
  private final Connection connection;
  private final JetStream stream;

  private NatsDrive(String servers) throws Exception {
    connection =
        Nats.connect(new Options.Builder().servers(servers.split(",")).maxMessagesInOutgoingQueue(0).build());
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

  @Override
  public void close() throws Exception {
    connection.close();
  }

  public static void main(String[] arguments) throws Exception {
    Drive.run(arguments, (servers, ledgers, inFlight) -> new NatsDrive(servers));
  }
}
